@echo off
rem Goes on with the newest run of a recipe.   resume.bat recipes\sdxl.yaml [options]
setlocal
call "%~dp0_begin.bat"
if %ERRORLEVEL% equ 0 "%LORA_ROCM%" train --resume latest %*
call "%~dp0_end.bat" %ERRORLEVEL% "%~f0"
exit /b %ERRORLEVEL%
